"""How replicas that train apart from each other agree."""
