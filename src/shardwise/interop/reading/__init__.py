"""Reading configurations of other engines: a file for each engine, `reader.py` in front of them."""
