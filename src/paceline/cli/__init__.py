"""The command line of Paceline."""
