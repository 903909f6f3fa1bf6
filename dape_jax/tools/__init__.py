"""Command-line tools for trained models: generate, attention_maps, lm_eval."""
