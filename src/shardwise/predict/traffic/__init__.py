"""Communication of one layout in closed form: the ledger of a step, and what a token moves."""
