"""Aggregation algorithms, one per file: the pure rule, and the class with both its sides.

``conf/strategy/`` describes their settings.
"""
