"""Fine-tuning trials: one seed at one learning rate, alone or several in one program."""
