"""This process's place in the world, and collectives among its members; the frameworks' frontends sit on it."""
