"""One module per figure, named as its experiment: results in, figures, claims and a table for the terminal out.

Every module has ``draw(results) -> {file stem: figure}``, ``claims(results) -> [Claim]`` and ``table(results) -> text``
(or None). Part of an experiment gives part of a figure; claims about the rest say "not run".
"""
