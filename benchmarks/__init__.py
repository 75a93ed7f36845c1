"""Side by side with the alternatives: each module measures ours and theirs in one run and gives rows of ratios."""
