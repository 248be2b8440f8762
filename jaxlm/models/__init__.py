"""Models, one file a paper. A model turns ids into states; heads and losses live above."""
