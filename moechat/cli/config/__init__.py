"""Option values from environment variables and the settings file."""
