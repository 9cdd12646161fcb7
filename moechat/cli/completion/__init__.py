"""Shell completion: the scripts, and the candidates for names and option values."""
