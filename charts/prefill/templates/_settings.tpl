{{/* The operator's settings file. Its names are those of operator/prefill_operator/settings.py, which refuses unknown ones. */}}
{{- define "prefill.settings" -}}
{{- $settings := dict
  "namespaces" (include "prefill.watchedNamespaces" . | fromJson).items
  "logLevel" (upper .Values.logging.level)
  "port" .Values.metrics.port
  "readinessGate" .Values.readinessGate.enabled
  "prometheusAddress" .Values.autoscaling.prometheus.serverAddress
  "lease" (dict
    "durationSeconds" .Values.leaderElection.leaseDurationSeconds
    "renewDeadlineSeconds" .Values.leaderElection.renewDeadlineSeconds
    "retrySeconds" .Values.leaderElection.retryPeriodSeconds)
  "signals" (dict
    "maintenanceTaints" .Values.maintenanceTaints
    "faultTaints" .Values.gpuFaults.taints
    "faultConditions" .Values.gpuFaults.conditions
    "faultAnnotations" .Values.gpuFaults.annotations)
  "security" .Values.security
  "rbac" (pick .Values.rbac "nodes" "autoscaling" "keda" "prometheusOperator" "networkPolicies")
-}}
{{ mergeOverwrite $settings (deepCopy .Values.settings) | toYaml }}
{{- end }}
