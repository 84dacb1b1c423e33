"""Communication between ranks: transports, what runs over them, and `Comms`, which records it."""
