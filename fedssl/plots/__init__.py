"""Plots of run folders, one family per file; `registry` names them."""
