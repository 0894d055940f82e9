"""What a person does in the first hour, with the commands of README and docs alone."""
