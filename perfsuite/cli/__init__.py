"""The command line beside pytest, one file per subcommand."""
