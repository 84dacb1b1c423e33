"""Layouts as other engines' configurations: one file per engine, `writer.py` in front of them."""
