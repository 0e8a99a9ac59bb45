"""A study of composition on the head tasks: recipes, recorded results, and the scripts that make both."""
