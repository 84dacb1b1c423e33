"""One module a view: `data(given)` turns the words of a URL into a `View`. Raises `UserError` for words that say
nothing."""
