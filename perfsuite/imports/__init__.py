"""Read figures that other tools measured from their logs; they are shown with their own label, never as a baseline."""
