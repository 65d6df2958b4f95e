"""Placement: which physical slots a sequence gets. One file per strategy, mechanisms beside them."""
