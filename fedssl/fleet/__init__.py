"""Fleets of real devices: the SuperLink's Control API, startup kits, and the commands of operators and owners."""
