"""Recipes: each turns a base model and rows into a trained adapter. `base.py` is the contract.

Recipes know nothing of processes, files or what ships; `train.run` calls them.
"""

from __future__ import annotations

from train.recipes.base import Recipe
from train.settings import RecipeName


def make_recipe(name: RecipeName) -> Recipe:
    """The recipe called `name`; imports the training libraries, which takes seconds."""
    if name == "sft-kl":
        from train.recipes.sft_kl import KLReplayRecipe

        return KLReplayRecipe()
    from train.recipes.sft import PlainRecipe

    return PlainRecipe()
