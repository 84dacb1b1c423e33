"""Predictions against published measurements and quoted numbers. The core never imports this."""
