"""The captured graph as a fast way to run the same thing: no Python mode between the ops."""
