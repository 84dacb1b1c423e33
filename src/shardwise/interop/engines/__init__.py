"""Other engines' configurations: a TOML file for each engine, and Python beside it for what is computed."""
