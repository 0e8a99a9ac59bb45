"""Files, terminals and plots, as all parts of the package use them."""
