"""Routes by what they are about; each module makes a router from what it needs."""
