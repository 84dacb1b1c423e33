"""Memory of one layout in closed form: bytes by class, the peak, and what a device has."""
