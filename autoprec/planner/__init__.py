"""Analysis, target and rules → Plan."""
