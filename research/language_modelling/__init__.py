"""A study of composition in language modelling: text, recipes, recorded results, and the scripts that make them."""
