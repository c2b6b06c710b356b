"""What is recorded or watched while a run goes on."""
