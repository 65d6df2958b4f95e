"""Packages that only some tests need."""

from __future__ import annotations

NEEDS_MODELS = "real runs and kernels need make install EXTRAS=dev,models"
"""Why a test is skipped where torch or transformers is absent."""
