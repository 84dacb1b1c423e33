"""Training state that is kept off the device: in the host's memory, or in a file of the rank."""
