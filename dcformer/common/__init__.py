"""What several rooms of the package share."""
