{{/* Pods of a dispatcher: (list root component values role). Only the loop alone has no HTTP. */}}
{{- define "collm.dispatcherPod" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $own := index . 2 -}}
{{- $role := index . 3 -}}
{{- $values := $root.Values.dispatcher -}}
{{- $http := ne $role "dispatch" -}}
{{- $local := and $http (eq (include "collm.tokenizer" $root) "/models/served") -}}
{{- $drain := get $values.settings "drain_s" | default 30 -}}
metadata: {{- include "collm.podMetadata" (list $root $component $own) | nindent 2 }}
spec:
  {{- include "collm.pod" (list $root $component 10001 $own) | nindent 2 }}
  terminationGracePeriodSeconds: {{ add $values.preStopSeconds (ceil $drain) 15 }}
  {{- if and $local (not $root.Values.model.claim) }}
  initContainers:
    - {{ include "collm.prepare" $root | indent 6 | trim }}
  {{- end }}
  containers:
    - name: dispatcher
      {{- include "collm.image" (list $root "collm-dispatcher") | nindent 6 }}
      args: [--role, {{ $role }}]
      env:
        {{- include "collm.redisEnv" (list $root "dispatcher") | nindent 8 }}
        - name: COLLM_DISPATCHER_MODELS
          value: {{ dict $root.Values.model.servedName (include "collm.tokenizer" $root) | toJson | quote }}
        {{- if $values.adapterClaim }}
        - name: COLLM_DISPATCHER_ADAPTER_DIR
          value: /adapters
        {{- end }}
        {{- if $http }}
        - name: COLLM_DISPATCHER_PORT
          value: "8000"
        {{- end }}
        {{- with include "collm.settingsEnv" (list "DISPATCHER" $values.settings) | trim }}{{ . | nindent 8 }}{{ end }}
        {{- with include "collm.hubEnv" $root }}{{ . | nindent 8 }}{{ end }}
        {{- with include "collm.extraEnv" $own }}{{ . | nindent 8 }}{{ end }}
      {{- if $http }}
      ports:
        - {name: http, containerPort: 8000}
      # A model's tokenizer is loaded, and the broker is there.
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 120
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /ready, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # Whoever sends requests here hears of the end before it begins.
      lifecycle:
        preStop:
          exec: {command: [sleep, {{ $values.preStopSeconds | quote }}]}
      {{- else }}
      {{- $lease := printf "dispatch:%s" $root.Values.model.servedName }}
      startupProbe:
        {{- include "collm.leaseProbe" (list $lease false) | nindent 8 }}
        periodSeconds: 10
        failureThreshold: 60
      livenessProbe:
        {{- include "collm.leaseProbe" (list $lease true) | nindent 8 }}
        periodSeconds: 20
        failureThreshold: 6
      readinessProbe:
        {{- include "collm.leaseProbe" (list $lease false) | nindent 8 }}
        periodSeconds: 20
        failureThreshold: 2
      {{- end }}
      resources: {{- toYaml $own.resources | nindent 8 }}
      securityContext: {{- include "collm.security" $root | nindent 8 }}
      volumeMounts:
        {{- include "collm.mounts" $root | nindent 8 }}
        {{- if $local }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if $values.adapterClaim }}
        - {name: adapters, mountPath: /adapters, readOnly: true}
        {{- end }}
  volumes:
    {{- include "collm.volumes" (list $root "1Gi") | nindent 4 }}
    {{- if $local }}
    {{- include "collm.models" $root | nindent 4 }}
    {{- end }}
    {{- if $values.adapterClaim }}
    - name: adapters
      persistentVolumeClaim: {claimName: {{ $values.adapterClaim }}, readOnly: true}
    {{- end }}
{{- end -}}
