"""Fits the coefficients of ``runners.simulated`` to this machine: real runs, a regression, a costs file."""
