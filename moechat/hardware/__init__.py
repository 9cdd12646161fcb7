"""What the machine has."""
