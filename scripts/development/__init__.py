"""What only people need who change this project."""
