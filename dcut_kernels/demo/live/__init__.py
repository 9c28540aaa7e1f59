"""The live demo: a drafter and a target decode with every policy in turn."""
