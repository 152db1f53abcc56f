"""Project training steps onto machines that are not here, from measurements on other machines."""
