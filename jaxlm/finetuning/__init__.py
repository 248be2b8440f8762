"""Fine-tuning trials, each one seed at one learning rate: one per program, or several stacked in one."""
