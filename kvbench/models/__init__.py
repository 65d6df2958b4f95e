"""Models for real runs: Hugging Face models of the shapes that ``conf/model/`` states.

The only place beside the torch runner and its attention that imports torch; ``sources`` alone does not.
"""
