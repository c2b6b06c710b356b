"""Strategies for any Flower app: subclasses of Flower's `FedAvg`, and the client mod that some of them need."""

from strategies.flower.client import client_mod
from strategies.flower.rules import EUA, EUC, LDAWA, MDAWA, FedEMA, FedU, LayerWise, LossWeighted

__all__ = ["EUA", "EUC", "LDAWA", "MDAWA", "FedEMA", "FedU", "LayerWise", "LossWeighted", "client_mod"]
