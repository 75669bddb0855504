"""What single model types need besides the table of sizes: config fields, and inputs."""

from support.recipes import text, vision
from support.recipes.recipe import Recipe

RECIPES: dict[str, Recipe] = {**text.RECIPES, **vision.RECIPES}
