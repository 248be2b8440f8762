"""Fine-tuning trials, each one seed at one learning rate: one trial per program or several vectorized."""
