"""``moechat doctor``: a report on the machine and the installation."""
