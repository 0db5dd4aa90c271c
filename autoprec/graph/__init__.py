"""Model → its sites."""
