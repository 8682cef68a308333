"""The libraries under measurement, each behind the same narrow contract (`base`)."""
