"""Generation over HTTP, as OpenAI's clients speak it: bodies and their description, answers, metrics, the server."""
