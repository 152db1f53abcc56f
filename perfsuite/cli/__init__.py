"""The command line beside pytest."""
