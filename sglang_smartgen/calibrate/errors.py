"""The one error of calibration."""

from __future__ import annotations


class CalibrationError(ValueError):
    """Something a user can put right; its text is one sentence."""
