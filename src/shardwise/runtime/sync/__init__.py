"""How replicas agree that do not train in lockstep: parameter servers, and outer steps."""
