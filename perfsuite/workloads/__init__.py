"""What is timed, one file each; every workload comes with the check of what it computed."""
