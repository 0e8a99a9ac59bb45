"""How models and `composed_attention` come to use the operators of `dcformer.ops`: names, checks, choices."""
